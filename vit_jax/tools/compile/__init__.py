"""The train step of a config, compiled for TPUs that need not be there."""
