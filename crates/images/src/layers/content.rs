//! The bytes of a layer on their way: counted and hashed as they come, then decompressed.

use std::{
    fmt,
    io::{self, BufRead, BufReader, Read},
    str::FromStr,
};

use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::StreamingDecoder;
use sha2::{Digest as _, Sha256};

/// What is read ahead, in bytes.
const BUFFER_BYTES: usize = 1 << 17;

/// The SHA-256 by which content is named.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Digest([u8; 32]);

/// A text that is no digest we know.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not a SHA-256 digest (`sha256:` and 64 hexadecimal digits)")]
pub(crate) struct NoDigest(String);

impl FromStr for Digest {
    type Err = NoDigest;

    fn from_str(text: &str) -> Result<Self, NoDigest> {
        let digits = text.strip_prefix("sha256:");
        let lower = |digits: &&str| !digits.bytes().any(|b| b.is_ascii_uppercase());
        let mut bytes = [0; 32];
        match digits
            .filter(lower)
            .map(|d| hex::decode_to_slice(d, &mut bytes))
        {
            Some(Ok(())) => Ok(Self(bytes)),
            _ => Err(NoDigest(text.chars().take(100).collect())),
        }
    }
}

impl Digest {
    /// Of these bytes.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// The hexadecimal digits alone.
    pub(crate) fn hex(&self) -> String {
        hex::encode(self.0)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.hex())
    }
}

/// A reader that knows what it should read. Whoever reads it to its end and gets no error has read
/// the content that the digest names.
pub(crate) struct Checked<R> {
    source: R,
    expected: Digest,
    /// How many bytes are still to come, where that was announced.
    left: Option<u64>,
    hash: Option<Sha256>,
    is_wrong: bool,
}

impl<R> fmt::Debug for Checked<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checked")
            .field("expected", &self.expected)
            .field("left", &self.left)
            .finish_non_exhaustive()
    }
}

impl<R: Read> Checked<R> {
    /// Checks that `source` has this digest, and this size where it was announced.
    pub(crate) fn new(source: R, expected: Digest, size: Option<u64>) -> Self {
        Self {
            source,
            expected,
            left: size,
            hash: Some(Sha256::new()),
            is_wrong: false,
        }
    }

    fn end(&mut self) -> io::Result<usize> {
        if let Some(left) = self.left.filter(|left| *left > 0) {
            return Err(self.wrong(&format!("is {left} bytes short")));
        }
        let Some(hash) = self.hash.take() else {
            return Ok(0);
        };
        let found = Digest(hash.finalize().into());
        if found != self.expected {
            return Err(self.wrong(&format!("was announced and {found} came")));
        }
        Ok(0)
    }

    /// What is wrong once stays wrong for whoever reads on.
    fn wrong(&mut self, what: &str) -> io::Error {
        self.is_wrong = true;
        let text = format!("{} {what}", self.expected);
        io::Error::new(io::ErrorKind::InvalidData, text)
    }
}

impl<R: Read> Read for Checked<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        if self.is_wrong {
            return Err(self.wrong("is not what was announced"));
        }
        let count = self.source.read(buffer)?;
        if count == 0 {
            return self.end();
        }
        if let Some(left) = self.left {
            match left.checked_sub(count as u64) {
                Some(left) => self.left = Some(left),
                None => return Err(self.wrong("is longer than was announced")),
            }
        }
        if let Some(hash) = &mut self.hash {
            hash.update(&buffer[..count]);
        }
        Ok(count)
    }
}

/// Tells by its first bytes how content is compressed and takes that away. The source is read to
/// its end even where the compressed stream ends before, so that its digest is checked.
///
/// # Errors
/// It cannot be read.
pub(crate) fn decompressed<'a>(source: impl Read + 'a) -> io::Result<Box<dyn Read + 'a>> {
    let mut source = BufReader::with_capacity(BUFFER_BYTES, source);
    let start = source.fill_buf()?;
    if start.starts_with(&[0x1f, 0x8b]) {
        Ok(Box::new(MultiGzDecoder::new(source)))
    } else if start.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
        Ok(Box::new(Zstd::new(source)?))
    } else {
        Ok(Box::new(source))
    }
}

/// Frames of Zstandard, one after the other, as parallel compressors write them.
struct Zstd<R: BufRead> {
    frame: Option<StreamingDecoder<R, ruzstd::decoding::FrameDecoder>>,
}

impl<R: BufRead> Zstd<R> {
    fn new(source: R) -> io::Result<Self> {
        let frame = StreamingDecoder::new(source).map_err(io::Error::other)?;
        Ok(Self { frame: Some(frame) })
    }
}

impl<R: BufRead> Read for Zstd<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while let Some(frame) = &mut self.frame {
            let count = frame.read(buffer)?;
            if count > 0 || buffer.is_empty() {
                return Ok(count);
            }
            let Some(ended) = self.frame.take() else {
                break;
            };
            let mut source = ended.into_inner();
            if source.fill_buf()?.is_empty() {
                break;
            }
            self.frame = Some(StreamingDecoder::new(source).map_err(io::Error::other)?);
        }
        Ok(0)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn read_all(source: impl Read) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        decompressed(source)?.read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    #[test]
    fn content_is_what_its_digest_names_or_an_error() {
        // R-P5
        let digest = Digest::of(b"hello");
        let read = |bytes: &'static [u8], size| read_all(Checked::new(bytes, digest, Some(size)));
        assert_eq!(read(b"hello", 5).unwrap(), b"hello");
        for (bytes, size, problem) in [
            (&b"hallo"[..], 5, "announced and sha256:"),
            (b"hello", 6, "1 bytes short"),
            (b"hello", 4, "longer than was announced"),
            (b"", 5, "5 bytes short"),
        ] {
            let error = read(bytes, size).unwrap_err().to_string();
            assert!(error.contains(problem), "{error}");
        }
        let mut wrong = Checked::new(&b"hallo"[..], digest, None);
        assert!(io::copy(&mut wrong, &mut io::sink()).is_err());
        assert!(io::copy(&mut wrong, &mut io::sink()).is_err());
    }

    #[test]
    fn digests_are_of_one_form() {
        let digest = Digest::of(b"");
        assert_eq!(digest.to_string().parse(), Ok(digest));
        let upper = digest.to_string().to_uppercase();
        for text in [
            "",
            "sha256:",
            "sha256:12",
            "md5:00",
            "sha256:../../x",
            &upper,
        ] {
            assert!(text.parse::<Digest>().is_err(), "{text}");
        }
    }

    #[test]
    fn compression_is_told_by_the_first_bytes() {
        let text = b"some text ".repeat(100_000);
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(&text).unwrap();
        let gzip = gzip.finish().unwrap();
        let level = ruzstd::encoding::CompressionLevel::Fastest;
        let zstd = ruzstd::encoding::compress_to_vec(&text[..], level);
        for compressed in [&gzip, &zstd, &text] {
            assert_eq!(read_all(&compressed[..]).unwrap(), text);
            // Two streams one after the other are one.
            let twice = compressed.repeat(2);
            assert_eq!(read_all(&twice[..]).unwrap(), text.repeat(2));
        }
        assert!(read_all(&gzip[..gzip.len() / 2]).is_err());
        assert!(read_all(&zstd[..zstd.len() / 2]).is_err());
        assert_eq!(read_all(&b""[..]).unwrap(), b"");
    }
}
