"""How much memory a run needs: permanent memory by arithmetic, passes by counting on fake tensors."""
