"""Inspects plans, models and steps: tables, recorded steps, HTML pages and a debugger."""
