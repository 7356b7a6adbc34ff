"""A plan on a model as one HTML page."""

from plan_api.view.page import view

__all__ = ["view"]
