"""A debugger for one of many ranks."""

from plan_api.inspect.debug.breakpoints import breakpoint  # noqa: A004  # its name in torch as well

__all__ = ["breakpoint"]
