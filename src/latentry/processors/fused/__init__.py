"""The same encoders, arranged for a GPU: equal to the models' own up to rounding, and several times quicker.

Weights and results are those of diffusers' and transformers' modules; what differs is the order of memory
and of passes over it. Channels lie last, convolutions run without their bias, and everything between two of
them (bias, norm, activation, padding) is one kernel. Nothing is compiled per shape, so a run of ten pictures
gains as much as one of ten million. ``fused`` has the kernels, the other files one model each.
"""
