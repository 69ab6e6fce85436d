"""How requests and tensors travel: ZeroMQ, TCP, or memory of one host, behind one interface."""
