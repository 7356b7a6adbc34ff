"""The parameters of models, as the planner's command line lays them out."""
