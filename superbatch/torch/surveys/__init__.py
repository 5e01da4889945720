"""The parts of `lr_survey`: batches, the option that is turned, and everything put back."""
