"""Example images and a clip, and a tour of the package over them: ``latentry demo``.

The files travel with the package, so the demo needs no checkout, no download and no GPU. They add 1.3 MB to
the wheel. ``ATTRIBUTION.md`` beside them says where they come from.
"""
