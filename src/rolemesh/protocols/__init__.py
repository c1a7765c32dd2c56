"""The seams: small protocols with several implementations each."""
