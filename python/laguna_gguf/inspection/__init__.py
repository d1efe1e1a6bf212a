"""What `inspect` says of each kind of file."""
