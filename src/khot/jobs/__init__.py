"""Long-running jobs behind the command line. They print nothing: they call back."""
