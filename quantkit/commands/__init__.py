"""One file per group of commands; imported by the command line when a command runs."""
