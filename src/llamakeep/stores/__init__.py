"""Stores: the tiers that keep blobs."""
