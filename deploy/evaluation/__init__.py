"""`penstock eval`: what is evaluated, its episodes and their figures."""
