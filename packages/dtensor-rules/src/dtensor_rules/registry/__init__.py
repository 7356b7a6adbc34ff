"""Rules: which calls they are for, and the plans that they make."""
