"""Episodes: samples that a driver plays with an environment, through the engine of the run."""
