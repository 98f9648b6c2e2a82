"""Gradient inversion of what clients really upload: whose images can a server see?

``attack`` is DLG (Zhu et al. 2019), ``uploads`` what each method sends, ``study`` the images,
methods and noise, ``report`` the table and the picture.
"""
