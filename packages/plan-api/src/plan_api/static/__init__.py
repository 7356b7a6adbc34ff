"""Static mode: operators run on local tensors, and hooks redistribute them (veScale, section 6.2).

Note: a *local parameter* is the plain tensor that modules find in place of a DTensor parameter. An
*eager fallback* is a module whose operators still run on DTensors. A *shadow model* is a second
module tree over the same parameters; the guard runs Eager on it to validate a static step.
"""
