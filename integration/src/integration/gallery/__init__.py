"""Pictures of the documentation, drawn from the packages: ``python -m integration.gallery``.

Each module in ``pictures`` draws one, and is found by its name ``PICTURE``. Its data come from the
code that it shows, computed on fake meshes or measured on ranks, and are never drawn by hand.
"""
