"""The router: OpenAI's HTTP API, the requests in flight, and the nodes that serve them."""
