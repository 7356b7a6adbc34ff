"""Operators whose result depends on the global tensor, on local tensors: dropout, losses, views.

A plan says how their inputs are placed (`plan.annotate("attn.<op:dropout>", ...)`). They are
intercepted in the module's own code only, and not in its children's. Each module here has one kind
of replacement, `install` the table of them.
"""

from plan_api.static.operators.factories import check_factory, install_factories
from plan_api.static.operators.initializers import install_initializers, use_initializers
from plan_api.static.operators.install import check_operators, install_operators

__all__ = [
    "check_factory",
    "check_operators",
    "install_factories",
    "install_initializers",
    "install_operators",
    "use_initializers",
]
