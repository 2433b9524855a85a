"""The long jobs behind the command line: they read files, train, and write reports; they print nothing."""
