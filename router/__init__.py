"""The router: HTTP front, request table, routing policy."""
