"""What a run measures of itself: time, memory, collectives, FLOPs, and dropout masks."""
