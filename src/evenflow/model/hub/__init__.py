"""Models on this machine and how they get there: from a model hub, a URL, a path or a wheel."""
