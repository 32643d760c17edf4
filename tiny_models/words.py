"""The words from which facts, filler and stories are put together."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    """
    Ada Adam Agnes Albert Alice Amos Anna Arthur Basil Beatrix Ben Bertha Boris Bruno Carla Carlos
    Cedric Clara Cora Daisy Daniel Dora Edgar Edith Elias Ella Emil Emma Enid Ernest Esther Eva Felix
    Fiona Flora Frank Freya Gerda Gilbert Grace Greta Gustav Hanna Harold Hazel Helen Henry Hilda Hugo
    Ida Ines Ingrid Irene Isaac Ivan Ivy Jack Jacob Jane Jasper Joan Jonas Josef Julia June Karl Kate
    Kira Lars Laura Lena Leo Lily Linus Lisa Lola Lorenz Lucy Luis Magnus Mara Mark Martha Max Mia Milo
    Mina Mona Nadia Nils Nina Noah Nora Olga Oliver Omar Oscar Otto Pablo Paul Penny Petra Philip
    Quentin Rachel Ralph Rita Robert Rosa Ruth Samuel Sara Selma Simon Sofia Stella Sven Tara Theo
    Thomas Tilda Tom Ulla Ursula Vera Victor Viola Walter Wanda Wendy Willem Yara Yusuf Zara Zoe
    """
)
COLOURS = _words("black blue brown golden green grey orange pink purple red silver white yellow")
OBJECTS = _words(
    """
    bag ball basket bell bicycle boat book bottle box bucket candle cart chair clock coat crown cup desk
    door drum fan flag flute gate glove hammer hat horn jar kettle key kite ladder lamp locker map mask
    mirror needle oven pencil piano pipe plate ring robe rope safe saw scarf shield shoe spoon stamp
    sword table tent torch tower trunk umbrella vase wagon watch wheel whistle
    """
)
PLACES = _words(
    """
    abbey airport bakery bank barn bridge cabin canal castle cave cellar chapel cottage dairy factory
    farm forest garden garage hall harbour hospital hotel inn island kitchen library lighthouse market
    mill mine museum office orchard palace park pier port prison quarry school shed ship stable station
    studio temple theatre tunnel village vineyard warehouse workshop
    """
)
ANIMALS = _words(
    """
    cat crow dog donkey duck fox frog goat goose hare horse lamb mouse owl pony swan
    """
)
