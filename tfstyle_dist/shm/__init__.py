"""Memory that processes of one host share: segments, sleeping, barriers, versioned pages, and who may attach.

It knows of no groups, strategies or servers: collectives, central storage and parameter servers are built on it.
"""
