def share(price, people):
    return price // people
