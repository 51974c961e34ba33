"""Skeleton-of-thought: an outline, then its points as branches."""
