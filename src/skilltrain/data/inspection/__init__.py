"""What training lists hold, on one page: `skilltrain inspect`."""
