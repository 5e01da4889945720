"""Virtual batches over several ranks."""
