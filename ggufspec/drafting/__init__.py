"""What is proposed, and how far: strategies, the draft length, costs and acceptance."""
