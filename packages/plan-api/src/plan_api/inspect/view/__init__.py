"""A plan on a model as one HTML page."""

from plan_api.inspect.view.page import view

__all__ = ["view"]
