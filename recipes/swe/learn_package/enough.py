def enough(paid, price):
    return paid >= price
