"""Images and videos: probing headers, decoding pixels, cutting them to buckets.

Needs the packages of ``latentry[encode]``.
"""

from latentry.extras import require_extra

require_extra("encode")
