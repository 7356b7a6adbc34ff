"""What the library does with calls: counts, logs, and checks against torch."""
