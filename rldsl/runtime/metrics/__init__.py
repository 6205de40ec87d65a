"""What a run reports: metrics, samples, a view of its progress, and its directory."""
