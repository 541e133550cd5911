//! Interfaces, addresses and routes, through the kernel's own interface (rtnetlink).

use std::{io, net::Ipv4Addr, os::fd::AsRawFd};

use futures::TryStreamExt;
use rtnetlink::{
    Error, Handle, LinkMessageBuilder, LinkUnspec, LinkVeth, RouteMessageBuilder,
    packet_route::{
        link::{InfoData, InfoVeth, LinkAttribute, LinkMessage},
        neighbour::NeighbourState,
        route::{RouteAddress, RouteAttribute, RouteScope},
    },
};

use super::namespace::{StepError, at};

/// The interface number of the loopback in every namespace.
const LOOPBACK_INDEX: u32 = 1;

/// Links of the namespace in which the calling thread was when this was made.
#[derive(Debug, Clone)]
pub(super) struct Links(Handle);

/// One end of a pair.
#[derive(Debug)]
pub(super) struct End<'a> {
    pub(super) name: &'a str,
    /// The kernel chooses one if there is none.
    pub(super) index: Option<u32>,
    pub(super) mac: [u8; 6],
}

impl Links {
    /// Opens a socket in the calling thread's namespace.
    pub(super) fn here() -> Result<Self, StepError> {
        let (connection, handle, _) =
            rtnetlink::new_connection().map_err(at("open a netlink socket"))?;
        tokio::spawn(connection);
        Ok(Self(handle))
    }

    /// Makes a pair of connected interfaces: one here, up; the other in `peer_namespace`, down,
    /// since the kernel turns on no interface whose other end is not there yet.
    pub(super) async fn add_pair(
        &self,
        here: &End<'_>,
        peer: &End<'_>,
        peer_namespace: &impl AsRawFd,
        mtu: u32,
    ) -> Result<(), Error> {
        let end = |end: &End<'_>| {
            let message = LinkUnspec::new_with_name(end.name)
                .address(end.mac.to_vec())
                .mtu(mtu);
            match end.index {
                Some(index) => message.index(index),
                None => message,
            }
        };
        let there = end(peer).setns_by_fd(peer_namespace.as_raw_fd()).build();
        let pair = LinkMessageBuilder::<LinkVeth>::new(here.name, peer.name)
            .address(here.mac.to_vec())
            .mtu(mtu)
            .up()
            .set_info_data(InfoData::Veth(InfoVeth::Peer(there)));
        let pair = match here.index {
            Some(index) => pair.index(index),
            None => pair,
        };
        self.0.link().add(pair.build()).execute().await
    }

    /// Turns the loopback on.
    pub(super) async fn loopback_up(&self) -> Result<(), Error> {
        self.up(LOOPBACK_INDEX).await
    }

    /// Turns an interface on.
    pub(super) async fn up(&self, index: u32) -> Result<(), Error> {
        let up = LinkUnspec::new_with_index(index).up().build();
        self.0.link().set(up).execute().await
    }

    /// Gives an interface an address, there or not.
    pub(super) async fn set_address(
        &self,
        index: u32,
        address: Ipv4Addr,
        prefix: u8,
    ) -> Result<(), Error> {
        let add = self.0.address().add(index, address.into(), prefix);
        add.replace().execute().await
    }

    /// Takes every address off an interface.
    pub(super) async fn remove_addresses(&self, index: u32) -> Result<(), Error> {
        let addresses = self.0.address().get().set_link_index_filter(index);
        let addresses: Vec<_> = addresses.execute().try_collect().await?;
        for address in addresses {
            self.0.address().del(address).execute().await?;
        }
        Ok(())
    }

    /// Sends everything else to `gateway`, which is on the interface's wire.
    pub(super) async fn set_default_route(
        &self,
        index: u32,
        gateway: Ipv4Addr,
    ) -> Result<(), Error> {
        let route = RouteMessageBuilder::<Ipv4Addr>::new()
            .gateway(gateway)
            .output_interface(index)
            .onlink()
            .build();
        self.0.route().add(route).replace().execute().await
    }

    /// Claims a route to exactly one address. `false` if it is there already.
    pub(super) async fn claim_route(&self, index: u32, address: Ipv4Addr) -> Result<bool, Error> {
        let route = RouteMessageBuilder::<Ipv4Addr>::new()
            .destination_prefix(address, 32)
            .output_interface(index)
            .scope(RouteScope::Link)
            .build();
        match self.0.route().add(route).execute().await {
            Ok(()) => Ok(true),
            Err(Error::NetlinkError(e)) if e.to_io().kind() == io::ErrorKind::AlreadyExists => {
                Ok(false)
            }
            Err(e) => Err(e),
        }
    }

    /// Tells for good which hardware address a neighbour has.
    pub(super) async fn set_neighbour(
        &self,
        index: u32,
        address: Ipv4Addr,
        mac: [u8; 6],
    ) -> Result<(), Error> {
        let neighbour = self.0.neighbours().add(index, address.into());
        neighbour
            .link_layer_address(&mac)
            .state(NeighbourState::Permanent)
            .replace()
            .execute()
            .await
    }

    /// Removes an interface; `false` if there is none of that name.
    pub(super) async fn remove(&self, name: &str) -> Result<bool, Error> {
        let Some(link) = self.find(name).await? else {
            return Ok(false);
        };
        self.0.link().del(link.header.index).execute().await?;
        Ok(true)
    }

    /// The number of an interface.
    pub(super) async fn index_of(&self, name: &str) -> Result<Option<u32>, Error> {
        Ok(self.find(name).await?.map(|link| link.header.index))
    }

    /// The names of all interfaces.
    pub(super) async fn names(&self) -> Result<Vec<String>, Error> {
        let links: Vec<LinkMessage> = self.0.link().get().execute().try_collect().await?;
        let name = |link: LinkMessage| {
            link.attributes
                .into_iter()
                .find_map(|attribute| match attribute {
                    LinkAttribute::IfName(name) => Some(name),
                    _ => None,
                })
        };
        Ok(links.into_iter().filter_map(name).collect())
    }

    /// The largest packet that the machine's own way out carries, if it has one.
    pub(super) async fn way_out_mtu(&self) -> Result<Option<u32>, Error> {
        let all = RouteMessageBuilder::<Ipv4Addr>::new().build();
        let routes: Vec<_> = self.0.route().get(all).execute().try_collect().await?;
        let out = routes.into_iter().find_map(|route| {
            let has_gateway = route.attributes.iter().any(|attribute| {
                matches!(attribute, RouteAttribute::Gateway(RouteAddress::Inet(_)))
            });
            (route.header.destination_prefix_length == 0 && has_gateway)
                .then_some(route.attributes)?
                .into_iter()
                .find_map(|attribute| match attribute {
                    RouteAttribute::Oif(index) => Some(index),
                    _ => None,
                })
        });
        let Some(index) = out else { return Ok(None) };
        let mut links = self.0.link().get().match_index(index).execute();
        let mtu = links.try_next().await?.and_then(|link| {
            link.attributes
                .into_iter()
                .find_map(|attribute| match attribute {
                    LinkAttribute::Mtu(mtu) => Some(mtu),
                    _ => None,
                })
        });
        Ok(mtu)
    }

    async fn find(&self, name: &str) -> Result<Option<LinkMessage>, Error> {
        let mut found = self.0.link().get().match_name(name.to_owned()).execute();
        match found.try_next().await {
            Ok(link) => Ok(link),
            Err(Error::NetlinkError(e)) if is_missing(&e.to_io()) => Ok(None),
            Err(e) => Err(e),
        }
    }
}

fn is_missing(error: &io::Error) -> bool {
    error.raw_os_error() == Some(nix::libc::ENODEV) || error.kind() == io::ErrorKind::NotFound
}
