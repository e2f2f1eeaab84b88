"""The texts and tables that `moe-dualpipe profile` prints."""
