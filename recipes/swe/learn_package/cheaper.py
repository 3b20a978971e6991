def cheaper(price, limit):
    return price < limit
