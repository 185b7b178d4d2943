"""What is on the disk: manifests and the one reader that compares files with them."""
