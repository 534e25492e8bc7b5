"""The HTTP gateway: REST in, and deliveries posted to HTTP targets. See docs/HTTP.md.

A process of its own beside the nodes; several of one configuration share the work, and losing one loses nothing.
"""
