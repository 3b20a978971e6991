def total(price, postage):
    return price + postage
