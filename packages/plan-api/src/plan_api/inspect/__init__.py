"""What a plan does to a model, and what a step runs: tables, records, pages, a debugger."""
