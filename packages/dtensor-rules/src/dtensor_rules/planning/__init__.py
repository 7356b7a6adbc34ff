"""Plans of calls: the sharding decision, its costs, and the results' shapes."""
