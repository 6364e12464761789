"""The test suite; a package, so that its helpers can be imported as `tests.<name>`."""
