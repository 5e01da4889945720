"""Everything that a window may change, one file each."""
