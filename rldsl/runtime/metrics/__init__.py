"""What a run tells of itself: metrics, samples, a view of its progress, and its directory."""
