"""Proxying of one completion request, from picking instances to the last byte of its response."""
