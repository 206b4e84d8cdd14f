"""K and V of two layers in the place of one, after Krul and MiniCache; lossy."""
