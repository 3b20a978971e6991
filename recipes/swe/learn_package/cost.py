def cost(price, count):
    return price * count
