"""A node of a cluster: both roles over one engine, one cache and one transport."""
