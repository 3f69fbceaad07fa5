"""Encoders for GPUs: the numbers of the models' own modules up to rounding, several times faster.

Weights and results are those of diffusers' and transformers' modules. The memory layout and the number of passes over
memory differ: channels are last, convolutions run without their bias, and everything between two of them (bias, norm,
activation, padding) is one kernel. Nothing is compiled per shape, so a run of ten images gains as much as one of ten
million.

``ops`` holds the operations and ``triton_kernels`` their GPU versions. There is one module per model, each with a class
whose ``supports`` compares the model's structure (``structure``). ``self_check`` compares its numbers with the model's
own when the model is loaded, and ``cuda_graphs`` captures it.
"""
