"""What a parameter server and its clients say to each other: headers, operations, handshake, the loop over peers."""
